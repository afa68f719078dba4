"""Online server of a trained model: Open Inference Protocol v2 over HTTP and gRPC, raw records, and live updates.

Needs the optional packages of `pip install 'colonnade[serve]'`.
"""
