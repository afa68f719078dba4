"""TorchRec between hosts, as in `exchange_torchrec`: it has towers for GPUs only."""

from workers.exchange_loop import serve
from workers.exchange_torchrec import build

if __name__ == "__main__":
    serve(build)
