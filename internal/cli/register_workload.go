package cli

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/join"
)

// workloadFlags are the flags of `register cluster-eks`, `cluster-gke` and `cluster-aks`.
type workloadFlags struct {
	registrationFlags
	identity libv1beta1.WorkloadIdentity
	caFile   string
}

func newRegisterEKS(streams command.Streams) *cobra.Command {
	f := &workloadFlags{identity: libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAWS, AWS: &libv1beta1.AWSIdentity{}}}
	cmd := &cobra.Command{
		Use:   "cluster-eks --namespace=<namespace> --cluster=<name>",
		Short: "Register an EKS cluster in push mode with the hub's AWS identity",
		Long: `Register an EKS cluster in push mode. The hub connects to the cluster with its own AWS identity
(IAM Roles for Service Accounts, Pod Identity, or other credentials that the AWS SDK finds) or with
the role --role-arn, and renews its tokens. An access entry of the cluster must give the identity
full permissions, and the hub must have the namespace in --workload-identity-namespaces. The command
cannot check that: the status of the SveltosCluster reports it.`,
		Example: `  aws eks describe-cluster --name=prod --query=cluster.certificateAuthority.data --output=text \
      | base64 -d > prod-ca.crt
  sveltosctl register cluster-eks --namespace=aws --cluster=prod --eks-cluster-name=prod \
      --region=eu-central-1 --ca-file=prod-ca.crt --labels=env=prod \
      --endpoint="$(aws eks describe-cluster --name=prod --query=cluster.endpoint --output=text)"

  # use a role in the account of the cluster
  sveltosctl register cluster-eks --namespace=aws --cluster=test --eks-cluster-name=test \
      --region=us-west-2 --ca-file=test-ca.crt --role-arn=arn:aws:iam::123456789012:role/towline \
      --endpoint=https://ABC.gr7.us-west-2.eks.amazonaws.com`,
	}
	aws := f.identity.AWS
	f.configure(streams, cmd, "EKS flags:", func(flags *pflag.FlagSet) {
		flags.StringVar(&aws.ClusterName, "eks-cluster-name", "", "`name` of the cluster in EKS (required)")
		flags.StringVar(&aws.RoleARN, "role-arn", "", "`ARN` of the role that the hub assumes (default no role)")
		flags.StringVar(&aws.Region, "region", "",
			"`region` of the cluster (default AWS_REGION in the environment of the hub)")
	})
	return cmd
}

func newRegisterGKE(streams command.Streams) *cobra.Command {
	f := &workloadFlags{identity: libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityGCP, GCP: &libv1beta1.GCPIdentity{}}}
	cmd := &cobra.Command{
		Use:   "cluster-gke --namespace=<namespace> --cluster=<name>",
		Short: "Register a GKE cluster in push mode with the hub's Google identity",
		Long: `Register a GKE cluster in push mode. The hub connects to the cluster with its own Google identity
(Workload Identity Federation, or other application default credentials) and renews its tokens. IAM
or RBAC must give the identity full permissions on the cluster, and the hub must have the namespace
in --workload-identity-namespaces. The command cannot check that: the status of the SveltosCluster
reports it.`,
		Example: `  gcloud container clusters describe prod --location=europe-west1 \
      --format='value(masterAuth.clusterCaCertificate)' | base64 -d > prod-ca.crt
  sveltosctl register cluster-gke --namespace=gcp --cluster=prod --project-id=shop \
      --gke-cluster-name=prod --location=europe-west1 --ca-file=prod-ca.crt --endpoint="$(gcloud \
      container clusters describe prod --location=europe-west1 --format='value(endpoint)')"`,
	}
	gcp := f.identity.GCP
	f.configure(streams, cmd, "GKE flags:", func(flags *pflag.FlagSet) {
		flags.StringVar(&gcp.ProjectID, "project-id", "", "`ID` of the project of the cluster (required)")
		flags.StringVar(&gcp.ClusterName, "gke-cluster-name", "", "`name` of the cluster in GKE (required)")
		flags.StringVar(&gcp.Location, "location", "", "`region` or zone of the cluster (required)")
	})
	return cmd
}

func newRegisterAKS(streams command.Streams) *cobra.Command {
	f := &workloadFlags{identity: libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAzure, Azure: &libv1beta1.AzureIdentity{}}}
	cmd := &cobra.Command{
		Use:   "cluster-aks --namespace=<namespace> --cluster=<name>",
		Short: "Register an AKS cluster in push mode with the hub's Entra identity",
		Long: `Register an AKS cluster in push mode. The hub connects to the cluster as the managed identity or
application --client-id, which must have a federated credential for the ServiceAccount of the hub
(Microsoft Entra Workload ID), and renews its tokens. The cluster must have the Entra integration,
and Azure RBAC or Kubernetes RBAC must give the identity full permissions. The hub must have the
namespace in --workload-identity-namespaces. The command cannot check that: the status of the
SveltosCluster reports it.`,
		Example: `  az aks get-credentials --resource-group=shop --name=prod --file=prod.yaml
  kubectl --kubeconfig=prod.yaml config view --raw \
      -o jsonpath='{.clusters[0].cluster.certificate-authority-data}' | base64 -d > prod-ca.crt
  sveltosctl register cluster-aks --namespace=azure --cluster=prod --ca-file=prod-ca.crt \
      --endpoint=https://prod-dns-1234.hcp.westeurope.azmk8s.io:443 \
      --tenant-id=<directory> --client-id=<identity>`,
	}
	azure := f.identity.Azure
	f.configure(streams, cmd, "AKS flags:", func(flags *pflag.FlagSet) {
		flags.StringVar(&azure.TenantID, "tenant-id", "", "`ID` of the Entra tenant (required)")
		flags.StringVar(&azure.ClientID, "client-id", "",
			"client `ID` of the managed identity or application (required)")
		flags.StringVar(&azure.SubscriptionID, "subscription-id", "",
			"`ID` of the subscription of the cluster, for information only")
		flags.StringVar(&azure.ResourceGroup, "resource-group", "",
			"`name` of the resource group of the cluster, for information only")
		flags.StringVar(&azure.ClusterName, "aks-cluster-name", "",
			"`name` of the cluster in AKS, for information only")
	})
	return cmd
}

// configure adds the common flags of all providers, the flags of one provider in a section title, and the run function.
func (f *workloadFlags) configure(streams command.Streams, cmd *cobra.Command, title string, addProvider func(*pflag.FlagSet)) {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), streams, cmd.Flags()) }
	command.AddSection(cmd.Flags(), command.SectionCluster, f.addCluster)
	command.AddSection(cmd.Flags(), command.SectionCluster, func(flags *pflag.FlagSet) {
		flags.StringVar(&f.identity.Endpoint, "endpoint", "", "https `URL` of the API server of the cluster (required)")
		flags.StringVar(&f.caFile, "ca-file", "",
			"`file` with the CA certificates of that URL, in PEM (default the CA certificates of the hub's system)")
	})
	command.AddSection(cmd.Flags(), title, addProvider)
	command.AddSection(cmd.Flags(), command.SectionGlobal, f.addVerbose)
}

func (f *workloadFlags) run(ctx context.Context, streams command.Streams, flags *pflag.FlagSet) error {
	if err := f.complete(); err != nil {
		return err
	}
	request := join.WorkloadRequest{Request: f.request, Identity: f.identity}
	if flags.Changed("ca-file") {
		var err error
		if request.CA, err = os.ReadFile(f.caFile); err != nil {
			return fmt.Errorf("--ca-file: %w", err)
		}
	}
	if err := request.Validate(); err != nil {
		return err
	}
	hub, err := hubConfig(ctx)
	if err != nil {
		return err
	}
	progress := f.startProgress(streams, "push mode", hub.Host)
	err = join.RegisterWorkload(ctx, hub, request)
	progress.stop()
	if err != nil {
		return err
	}
	return f.printRegistered(streams)
}
