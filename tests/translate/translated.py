"""What the tests of translations share: a file of another tool becomes a configuration that `load` accepts."""

from former import flat
from pretrax.config import load
from pretrax.translate import translate, yaml_text


def translated(tool, path, text=None, devices=None):
    """(translation, configuration) of a file, which is written first if its text is given."""
    if text is not None:
        path.write_text(text)
    translation = translate(tool, path, devices)
    out = path.with_name(f'{path.stem}-translated.yaml')
    out.write_text(yaml_text(translation))
    return translation, load(out)


def given(component):
    """The options of a component that its file gives; those of the decoder with the names of the tables."""
    return flat(component.options.model_dump(exclude_unset=True))
