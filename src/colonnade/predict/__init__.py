"""Prediction: scores of batches and files from an exported model, rows read in place."""

from colonnade.predict.predictor import Predictor

__all__ = ["Predictor"]
