"""What the backend for TensorFlow is made of. TensorFlow and keras are imported inside functions, when they are needed."""
