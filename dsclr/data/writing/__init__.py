"""Images and captions in, WebDataset shards out."""

from dsclr.data.writing.folder import folder_source
from dsclr.data.writing.make import Made, Settings, make_shards
from dsclr.data.writing.source import Source
from dsclr.data.writing.table import table_source
from dsclr.data.writing.vision import torchvision_source

__all__ = ["Made", "Settings", "Source", "folder_source", "make_shards", "table_source", "torchvision_source"]
