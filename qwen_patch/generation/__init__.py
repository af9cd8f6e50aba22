"""The decode runtime behind `model.generate`: which calls it takes, its buffers, its loop."""
