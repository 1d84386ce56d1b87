"""The sabotages, by what they break. Each is filed in :data:`conformance.sabotages.saboteur.SABOTAGES`."""
