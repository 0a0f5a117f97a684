"""The pages of the site that are made from the code when it is built: flags, metrics, errors, rewards, presets."""
