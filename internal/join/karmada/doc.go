// Package karmada brings clusters into the fleet, and out of it, as karmadactl does.
package karmada
