// Package register brings the cluster that it is run beside into the fleet, as karmadactl register does.
package register
