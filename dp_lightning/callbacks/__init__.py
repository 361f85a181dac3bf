"""Lightning callbacks: private training, post-processing of the privatized gradient, progress and results."""

from dp_lightning.callbacks.averaging import AveragedWeights
from dp_lightning.callbacks.data_record import DataRecord
from dp_lightning.callbacks.postprocess import PostProcessCallback
from dp_lightning.callbacks.predictions import PredictionFile
from dp_lightning.callbacks.privacy import PrivacyCallback
from dp_lightning.callbacks.progress import PrivateProgressBar
from dp_lightning.callbacks.result_file import ResultFile
from dp_lightning.callbacks.signal_to_noise import SignalToNoise
from dp_lightning.callbacks.stop_on_signal import StopOnSignal

__all__ = [
    "AveragedWeights",
    "DataRecord",
    "PostProcessCallback",
    "PredictionFile",
    "PrivacyCallback",
    "PrivateProgressBar",
    "ResultFile",
    "SignalToNoise",
    "StopOnSignal",
]
