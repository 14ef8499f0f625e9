// Package departures takes clusters out of the fleet, in an order that can be cut off anywhere.
package departures
