"""What publishers and consumers share in talking to a broker through kombu."""
