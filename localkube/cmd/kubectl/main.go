// Command kubectl is the upstream Kubernetes client, built from its module so that nothing need be installed.
package main

import (
	"fmt"
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"

	"github.com/towline/towline/localkube/internal/release"

	// Sign-in with OIDC and the cloud providers, as the released kubectl has them.
	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() {
	if err := release.Set(); err != nil {
		fmt.Fprintln(os.Stderr, "kubectl:", err)
		os.Exit(1)
	}
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
}
