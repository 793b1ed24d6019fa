"""Attention by cuDNN, through nvidia-cudnn-frontend."""
