package cli

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
)

// workloadFlags are the flags of `register cluster-eks`, `cluster-gke` and `cluster-aks`.
type workloadFlags struct {
	joiningFlags
	identity libv1beta1.WorkloadIdentity
	caFile   string
}

// workloadHelp ends the help of each of these commands.
const workloadHelp = `

No kubeconfig and no secret is kept: the hub gets short-lived tokens as it needs them, and renews them. Only the hub can find out whether
the cluster lets it in: look at the status of the SveltosCluster.

Registering a cluster again changes what is given, keeps the rest, and adds the labels. A registration that fails or is interrupted leaves
everything as it was.`

func newRegisterEKS(streams Streams) *cobra.Command {
	f := &workloadFlags{identity: libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAWS, AWS: &libv1beta1.AWSIdentity{}}}
	cmd := f.command(streams, &cobra.Command{
		Use:   "cluster-eks --namespace=<namespace> --cluster=<name> --endpoint=<address> --eks-cluster-name=<name>",
		Short: "Register an EKS cluster, which the hub dials with its own AWS identity",
		Long: `Register an EKS cluster with the hub that KUBECONFIG points at. The hub dials it in push mode with its own AWS identity (IAM Roles for
Service Accounts, Pod Identity, or what else the AWS SDK finds in its environment), or with the role --role-arn, which that identity may assume.
An access entry of the EKS cluster must give that identity the right to do everything there.` + workloadHelp,
		Example: `  aws eks describe-cluster --name=prod --query=cluster.certificateAuthority.data --output=text | base64 -d > prod-ca.crt
  sveltosctl register cluster-eks --namespace=aws --cluster=prod --eks-cluster-name=prod --region=eu-central-1 \
      --endpoint="$(aws eks describe-cluster --name=prod --query=cluster.endpoint --output=text)" --ca-file=prod-ca.crt --labels=env=prod

  # by a role in the account of the cluster
  sveltosctl register cluster-eks --namespace=aws --cluster=test --eks-cluster-name=test --region=us-west-2 \
      --endpoint=https://ABC.gr7.us-west-2.eks.amazonaws.com --ca-file=test-ca.crt --role-arn=arn:aws:iam::123456789012:role/towline`,
	})
	aws := f.identity.AWS
	cmd.Flags().StringVar(&aws.ClusterName, "eks-cluster-name", "", "`name` of the cluster in EKS (required)")
	cmd.Flags().StringVar(&aws.RoleARN, "role-arn", "", "`ARN` of the role that the hub assumes (default: none, it is itself)")
	cmd.Flags().StringVar(&aws.Region, "region", "", "`region` of the cluster (default: AWS_REGION in the hub's environment)")
	return cmd
}

func newRegisterGKE(streams Streams) *cobra.Command {
	f := &workloadFlags{identity: libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityGCP, GCP: &libv1beta1.GCPIdentity{}}}
	cmd := f.command(streams, &cobra.Command{
		Use: "cluster-gke --namespace=<namespace> --cluster=<name> --endpoint=<address> --project-id=<id> --gke-cluster-name=<name> " +
			"--location=<location>",
		Short: "Register a GKE cluster, which the hub dials with its own Google identity",
		Long: `Register a GKE cluster with the hub that KUBECONFIG points at. The hub dials it in push mode with its own Google identity (Workload
Identity Federation, or what else the application default credentials of its environment are). IAM or RBAC must give that identity the right to
do everything on the cluster.` + workloadHelp,
		Example: `  gcloud container clusters describe prod --location=europe-west1 --format='value(masterAuth.clusterCaCertificate)' | base64 -d > prod-ca.crt
  sveltosctl register cluster-gke --namespace=gcp --cluster=prod --project-id=shop --gke-cluster-name=prod --location=europe-west1 \
      --endpoint="$(gcloud container clusters describe prod --location=europe-west1 --format='value(endpoint)')" --ca-file=prod-ca.crt`,
	})
	gcp := f.identity.GCP
	cmd.Flags().StringVar(&gcp.ProjectID, "project-id", "", "`id` of the cluster's project (required)")
	cmd.Flags().StringVar(&gcp.ClusterName, "gke-cluster-name", "", "`name` of the cluster in GKE (required)")
	cmd.Flags().StringVar(&gcp.Location, "location", "", "`region` or zone of the cluster (required)")
	return cmd
}

func newRegisterAKS(streams Streams) *cobra.Command {
	f := &workloadFlags{identity: libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAzure, Azure: &libv1beta1.AzureIdentity{}}}
	cmd := f.command(streams, &cobra.Command{
		Use:   "cluster-aks --namespace=<namespace> --cluster=<name> --endpoint=<address> --tenant-id=<id> --client-id=<id>",
		Short: "Register an AKS cluster, which the hub dials with its own Entra identity",
		Long: `Register an AKS cluster with the hub that KUBECONFIG points at. The hub dials it in push mode as the managed identity or application
--client-id, which must have a federated credential for the hub's ServiceAccount (Microsoft Entra Workload ID). The cluster must have the Entra
integration, and Azure RBAC or Kubernetes RBAC must give that identity the right to do everything there.` + workloadHelp,
		Example: `  az aks get-credentials --resource-group=shop --name=prod --file=prod.yaml
  kubectl --kubeconfig=prod.yaml config view --raw -o jsonpath='{.clusters[0].cluster.certificate-authority-data}' | base64 -d > prod-ca.crt
  sveltosctl register cluster-aks --namespace=azure --cluster=prod --tenant-id=<directory> --client-id=<identity> \
      --endpoint=https://prod-dns-1234.hcp.westeurope.azmk8s.io:443 --ca-file=prod-ca.crt \
      --subscription-id=<subscription> --resource-group=shop --aks-cluster-name=prod`,
	})
	azure := f.identity.Azure
	cmd.Flags().StringVar(&azure.TenantID, "tenant-id", "", "`id` of the directory (required)")
	cmd.Flags().StringVar(&azure.ClientID, "client-id", "", "client `id` of the managed identity or application (required)")
	cmd.Flags().StringVar(&azure.SubscriptionID, "subscription-id", "", "`id` of the subscription of the cluster, for people")
	cmd.Flags().StringVar(&azure.ResourceGroup, "resource-group", "", "`name` of the resource group of the cluster, for people")
	cmd.Flags().StringVar(&azure.ClusterName, "aks-cluster-name", "", "`name` of the cluster in AKS, for people")
	return cmd
}

// command gives cmd the flags that all providers have, and its work.
func (f *workloadFlags) command(streams Streams, cmd *cobra.Command) *cobra.Command {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), streams, cmd.Flags()) }
	flags := cmd.Flags()
	f.add(flags)
	flags.StringVar(&f.identity.Endpoint, "endpoint", "", "`address` of the cluster's API server, https (required)")
	flags.StringVar(&f.caFile, "ca-file", "", "`file` with the certificate authority of that address, in PEM (default: those of the hub's system)")
	return cmd
}

func (f *workloadFlags) run(ctx context.Context, streams Streams, flags *pflag.FlagSet) error {
	if err := f.parse(); err != nil {
		return err
	}
	request := join.WorkloadRequest{Request: f.cluster, Identity: f.identity}
	if flags.Changed("ca-file") {
		var err error
		if request.CA, err = os.ReadFile(f.caFile); err != nil {
			return fmt.Errorf("--ca-file: %w", err)
		}
	}
	if err := request.Validate(); err != nil {
		return err
	}
	hub, err := hubConfig("")
	if err != nil {
		return err
	}
	doing := f.talk(streams, "push mode", hub.Host)
	err = join.RegisterWorkload(ctx, hub, request)
	doing.done()
	if err != nil {
		return err
	}
	return f.pushed(streams)
}
