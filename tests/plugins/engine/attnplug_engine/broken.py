raise OSError("the library of this engine is gone")
