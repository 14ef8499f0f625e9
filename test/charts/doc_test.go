// Package charts compares Towline's deployments with Helm's renderings, for chart archives of the user's choice.
package charts
