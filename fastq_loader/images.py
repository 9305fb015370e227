"""Images: encoded in the dataset, decoded in a worker or on a batch. See `fastq_loader.extras.images`."""

from fastq_loader.extras.images.decode_images import DecodeImages
from fastq_loader.extras.images.decoders import DecodeError
from fastq_loader.extras.images.encoded import Encoded, EncodedBatch, encoded

__all__ = ["DecodeError", "DecodeImages", "Encoded", "EncodedBatch", "encoded"]
