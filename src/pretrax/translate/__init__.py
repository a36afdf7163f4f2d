"""Configurations of other tools, translated into configurations of pretrax. docs/coming-from/ has a page for each."""

from pretrax.translate.tools import TOOLS, translate
from pretrax.translate.translation import Fate, Translation
from pretrax.translate.written import summary, yaml_text

__all__ = ['TOOLS', 'Fate', 'Translation', 'summary', 'translate', 'yaml_text']
