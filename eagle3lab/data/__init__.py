"""From stored rows to packed batches, under the names of speculators 0.3 and 0.4. Plain torch."""

from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.legacy import list_files, split_files, standardize_data_v0, standardize_data_v1
from eagle3lab.data.noise import AddGaussianNoise, AddUniformNoise, TransformTensors, build_noise
from eagle3lab.data.packing import PackBatchSampler
from eagle3lab.data.shift import shift_batch

__all__ = [
    "AddGaussianNoise",
    "AddUniformNoise",
    "Eagle3SampleFileDataset",
    "PackBatchSampler",
    "TransformTensors",
    "build_noise",
    "create_collate_fn",
    "list_files",
    "shift_batch",
    "split_files",
    "standardize_data_v0",
    "standardize_data_v1",
]
