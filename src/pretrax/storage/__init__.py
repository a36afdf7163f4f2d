"""Directories on disks and in buckets, behind one subset of `pathlib.Path`.

`locate` turns what a user wrote into a `Path` or a `BucketPath`. Both raise `OSError`, so a reader of files can also
read objects.
"""

from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.connection import StorageSettings, use_settings
from pretrax.storage.locate import AnyPath, locate, locate_local, locate_run

__all__ = ['AnyPath', 'BucketPath', 'StorageSettings', 'locate', 'locate_local', 'locate_run', 'use_settings']
