package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func newShow(streams Streams) *cobra.Command {
	return parent("show", "Show what is deployed on the clusters of the fleet", newShowAddons(streams))
}

// addonFilter says which rows `show addons` shows; what is empty does not filter.
type addonFilter struct {
	namespace, cluster, profile string
	charts, resources           bool
}

func newShowAddons(streams Streams) *cobra.Command {
	filter, output := addonFilter{}, ""
	cmd := &cobra.Command{
		Use:   "addons",
		Short: "Show the charts and objects that profiles have on each cluster",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := filter.validate(); err != nil {
				return err
			}
			if err := validateOutput(output); err != nil {
				return err
			}
			rows, err := findAddons(cmd.Context(), streams, filter)
			if err != nil {
				return err
			}
			if output == outputJSON {
				return printJSON(streams.Out, rows)
			}
			return printAddons(streams.Out, rows)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&filter.namespace, "namespace", "", "only clusters in this `namespace`")
	flags.StringVar(&filter.cluster, "cluster", "", "only the cluster of this `name`")
	flags.StringVar(&filter.profile, "profile", "", "only what this profile has deployed, as `kind/name`")
	flags.BoolVar(&filter.charts, "helm-charts", false, "only charts")
	flags.BoolVar(&filter.resources, "resources", false, "only objects that no chart brought")
	flags.Bool("verbose", false, "accepted for scripts; there is nothing more to say")
	outputFlag(cmd, &output)
	return cmd
}

func (f addonFilter) validate() error {
	kind, name, ok := strings.Cut(f.profile, "/")
	if f.profile != "" && (!ok || name == "" || (kind != configv1beta1.ClusterProfileKind && kind != configv1beta1.ProfileKind)) {
		return fmt.Errorf("--profile: %q is not ClusterProfile/<name> or Profile/<name>", f.profile)
	}
	return nil
}

func findAddons(ctx context.Context, streams Streams, filter addonFilter) ([]addon, error) {
	config, err := hubConfig("")
	if err != nil {
		return nil, err
	}
	defer progress(streams, "reading what is deployed from "+config.Host)()
	hub, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	configurations := &configv1beta1.ClusterConfigurationList{}
	err = hub.List(ctx, configurations, client.InNamespace(filter.namespace))
	if meta.IsNoMatchError(err) {
		return nil, join.ErrNotInstalled
	}
	if err != nil {
		return nil, fmt.Errorf("read what is deployed: %w", err)
	}
	return filter.of(addonsOf(configurations.Items)), nil
}

func printAddons(out io.Writer, rows []addon) error {
	lines := [][]string{{"CLUSTER", "RESOURCE TYPE", "NAMESPACE", "NAME", "VERSION", "TIME", "DEPLOYMENT TYPE", "PROFILES"}}
	for _, row := range rows {
		at := "N/A"
		if row.Time != nil {
			at = row.Time.String()
		}
		lines = append(lines, []string{
			row.Cluster, row.ResourceType, row.Namespace, row.Name, row.Version, at, row.DeploymentType, strings.Join(row.Profiles, ";"),
		})
	}
	return printTable(out, lines)
}
