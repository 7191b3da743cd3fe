"""Pool, session, statement loader, LISTEN/NOTIFY, migrations, table definitions."""
