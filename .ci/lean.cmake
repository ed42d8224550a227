# For llama-cpp-python's build: leaves out llama.cpp's library for its own programs, half of the work, which no binding uses.
# The build switches it on in the cache; a variable of the same name comes first (policy CMP0126).
set(LLAMA_BUILD_COMMON OFF)
