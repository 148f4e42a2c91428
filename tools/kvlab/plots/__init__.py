"""The figures that the notebooks show.

Called by the notebooks (`from kvlab import plots`). Never computes an answer to a TODO: it draws what it is given.
"""
