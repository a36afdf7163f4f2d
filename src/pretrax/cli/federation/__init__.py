"""Watch and repeat runs that train one model and share only a bucket."""
