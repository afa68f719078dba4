"""Prediction of scores for batches and files from an exported model, with rows read in place."""

from colonnade.predict.predictor import Predictor

__all__ = ["Predictor"]
