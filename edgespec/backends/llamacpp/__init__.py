"""llama.cpp through the low-level ctypes API of llama-cpp-python: GGUF models on CPU, CUDA, Metal, Vulkan, ROCm."""
