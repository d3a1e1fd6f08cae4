"""Models of the Llama family: their network, and their weights and tokens as Hugging Face and llama.cpp keep them."""
