"""What does the wrapper cost the host, per parameter, bucket and launch?"""
