//go:build imports

package hack

import (
	_ "github.com/google/cel-go/cel"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/klauspost/compress/zstd"
	_ "github.com/spf13/cobra"
	_ "helm.sh/helm/v4/pkg/action"
	_ "k8s.io/api/core/v1"
	_ "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	_ "k8s.io/client-go/kubernetes"
	_ "k8s.io/utils/clock"
	_ "sigs.k8s.io/controller-runtime"
	_ "sigs.k8s.io/yaml"
	_ "k8s.io/kubectl/pkg/cmd"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sync/singleflight"
	_ "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	_ "github.com/google/go-containerregistry/pkg/registry"
)
