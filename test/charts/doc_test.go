// Package charts compares what Towline deploys with what Helm renders, for chart archives of the user's choice.
package charts
