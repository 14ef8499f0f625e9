// Package fleet knows who the members are: one Member over every cluster kind, and a client for each.
package fleet
