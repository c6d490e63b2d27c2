"""Keras 3 models on any engine: their names, their files, their way to the workers. Imports neither torch nor TensorFlow.

keras itself is imported by nobody here before the user's script has done it: it fixes its own engine when it is imported.
"""
