package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func newShow(streams command.Streams) *cobra.Command {
	return command.NewParent("show", "Show deployed add-ons", newShowAddons(streams))
}

// addonFilter has the flags of `show addons` that select rows. An empty field selects all.
type addonFilter struct {
	namespace, cluster, profile string
	charts, resources           bool
}

func newShowAddons(streams command.Streams) *cobra.Command {
	filter, output := addonFilter{}, ""
	cmd := &cobra.Command{
		Use:   "addons",
		Short: "Print the charts and objects that profiles deployed on each cluster",
		Long: `Print a table of the charts and objects that ClusterProfiles and Profiles deployed on each cluster,
from the ClusterConfigurations of the hub.`,
		Example: `  # print the add-ons of one cluster
  sveltosctl show addons --namespace=monitoring --cluster=prod-cluster

  # print the charts of one profile as JSON
  sveltosctl show addons --profile=ClusterProfile/kyverno --helm-charts -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := filter.validate(); err != nil {
				return err
			}
			if err := command.ValidateOutput(output); err != nil {
				return err
			}
			rows, err := findAddons(cmd.Context(), streams, filter)
			if err != nil {
				return err
			}
			if output == command.OutputJSON {
				return command.PrintJSON(streams.Out, rows)
			}
			return printAddons(streams.Out, rows)
		},
	}
	command.AddSection(cmd.Flags(), "Filter flags:", filter.add)
	command.AddSection(cmd.Flags(), command.SectionOther, func(flags *pflag.FlagSet) { command.AddOutput(flags, &output) })
	command.AddSection(cmd.Flags(), command.SectionGlobal, func(flags *pflag.FlagSet) {
		flags.Bool("verbose", false, "no effect; kept for compatibility")
	})
	return cmd
}

func (f *addonFilter) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.namespace, "namespace", "", "`namespace` of the clusters (default all namespaces)")
	flags.StringVar(&f.cluster, "cluster", "", "`name` of the cluster (default all clusters)")
	flags.StringVar(&f.profile, "profile", "",
		"profile that deployed the add-on, as `kind/name` (default all profiles)")
	flags.BoolVar(&f.charts, "helm-charts", false, "charts only")
	flags.BoolVar(&f.resources, "resources", false, "objects outside of charts only")
}

func (f addonFilter) validate() error {
	kind, name, ok := strings.Cut(f.profile, "/")
	if f.profile != "" && (!ok || name == "" || (kind != configv1beta1.ClusterProfileKind && kind != configv1beta1.ProfileKind)) {
		return fmt.Errorf("--profile: %q is not ClusterProfile/<name> or Profile/<name>", f.profile)
	}
	return nil
}

func findAddons(ctx context.Context, streams command.Streams, filter addonFilter) ([]addon, error) {
	config, err := hubConfig(ctx)
	if err != nil {
		return nil, err
	}
	defer startProgress(streams, "reading the deployed add-ons from "+config.Host).stop()
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the hub: %w", err)
	}
	configurations := &configv1beta1.ClusterConfigurationList{}
	err = hubClient.List(ctx, configurations, client.InNamespace(filter.namespace))
	if meta.IsNoMatchError(err) {
		return nil, join.ErrNotInstalled
	}
	if err != nil {
		return nil, fmt.Errorf("list ClusterConfigurations: %w", err)
	}
	return filter.filterRows(addonsOf(configurations.Items)), nil
}

func printAddons(out io.Writer, rows []addon) error {
	lines := [][]string{{"CLUSTER", "RESOURCE TYPE", "NAMESPACE", "NAME", "VERSION", "TIME", "DEPLOYMENT TYPE", "PROFILES"}}
	for _, row := range rows {
		applied := "N/A"
		if row.Time != nil {
			applied = row.Time.String()
		}
		lines = append(lines, []string{
			row.Cluster, row.ResourceType, row.Namespace, row.Name, row.Version, applied, row.DeploymentType, strings.Join(row.Profiles, ";"),
		})
	}
	return printTable(out, lines)
}
