// Package spaces gives every Cluster its execution space, and takes Clusters out of the fleet, in an order that can be cut off anywhere.
package spaces
