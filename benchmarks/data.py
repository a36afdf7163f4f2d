"""Runs both data benchmarks: from text to tokens, and from tokens to batches.

uv run python benchmarks/data.py
"""

import subprocess
import sys
from pathlib import Path

for part in ('data_tokenizing.py', 'data_loading.py'):
    subprocess.run([sys.executable, Path(__file__).with_name(part)], check=True)
