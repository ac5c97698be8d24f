"""Recipes that take the one-process model and spread its work; each gives the model back.

    checkpoint_activations(model, Recompute(mode="full"))      # forget activations, compute again

A recipe changes how the model runs, never what it computes: the loss, the gradients and the names
of the parameters stay those of `labsupport.model`.
"""
