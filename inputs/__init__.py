"""Files of users: opened, bounded and decoded in one way, before any package asks what they mean."""
