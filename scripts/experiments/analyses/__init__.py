"""What is measured of a trained model beside its scores."""
