"""Graph -> Plan: which engine takes which node, and where values live."""
