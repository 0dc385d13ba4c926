"""The reference model: a procedural world, the trainer, the evaluator and the small trained pipeline."""
