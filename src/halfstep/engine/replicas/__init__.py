"""Many replicas: who they are, what they tell each other, and what their wrappers do to gradients."""
