"""A recorded trace read, judged, and run again under other assumptions."""
