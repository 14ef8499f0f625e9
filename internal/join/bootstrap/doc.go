// Package bootstrap gives a cluster that has a token an identity on the hub.
package bootstrap
