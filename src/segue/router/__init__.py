"""The router: one front door for several workers, which chooses who computes and who decodes each request."""
