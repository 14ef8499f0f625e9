// Package join brings a cluster into the fleet by kubeconfig, CSR or bootstrap token, and rotates its credentials.
package join
