"""Handle Keras 3 models on any engine: name and store their variables, and send the models to workers. Imports neither
torch nor TensorFlow. An engine is the library that Keras computes with (torch, TensorFlow or JAX).

No module here imports keras before the user's script does, because keras fixes its engine when it is imported.
"""
