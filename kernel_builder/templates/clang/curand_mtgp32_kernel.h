// Clang includes this header of cuRAND before every CUDA source. A toolkit without cuRAND lacks it, and clangd drops
// the bases of classes after an include that fails.
