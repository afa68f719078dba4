"""Operations of the native core in plain PyTorch, which define it (`reference`, `optimizers`), and fused operators."""
