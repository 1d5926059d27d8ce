"""Other people's programs through halstack's ops. Each module here needs the library it is for."""
