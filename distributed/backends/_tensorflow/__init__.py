"""Parts of the backend for TensorFlow. TensorFlow and keras are imported inside functions, when they are needed."""
