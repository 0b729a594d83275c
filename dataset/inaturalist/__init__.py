"""iNaturalist-User-120k and -Geo (Hsu, Qi and Brown, Section 4.1)."""
